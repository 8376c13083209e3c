"""``modpass generate``: text from an exported decoder, as it comes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from modpass.cli.console import mebibytes
from modpass.errors import InputError, MissingExtraError

__all__ = ["TextStream", "command"]

Folder = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL_DIR", exists=True, file_okay=False, show_default=False, help="A folder of 'export-decoder'."
    ),
]
Prompt = Annotated[str, typer.Argument(metavar="PROMPT", show_default=False, help="The text to continue.")]
New = Annotated[int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Tokens to add at most.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token.")]
TopK = Annotated[int | None, typer.Option("--top-k", min=1, show_default="all", help="Draw among the K likeliest.")]
TopP = Annotated[
    float | None, typer.Option("--top-p", show_default="1", help="Draw among the likeliest that hold this probability.")
]
Seed = Annotated[int | None, typer.Option("--seed", show_default="none", help="Makes draws repeatable.")]
Chat = Annotated[bool, typer.Option("--chat", help="Put the prompt into the tokenizer's chat template.")]
BackendOption = Annotated[
    Literal["onnxruntime", "onnxruntime-cuda", "tensorrt-rtx", "tensorrt"],
    typer.Option(
        "--backend",
        help="What runs the graphs: ONNX Runtime on the processor or on a GPU (pip install 'modpass[gpu]'), or the "
        "engines of 'modpass build MODEL_DIR'.",
    ),
]


def command(
    folder: Folder,
    prompt: Prompt,
    max_new_tokens: New = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    chat: Chat = False,
    backend: BackendOption = "onnxruntime",
) -> None:
    """Continue PROMPT with an exported decoder.

    Text comes as it is made; at the end it says how fast it went and how often routed blocks were skipped.
    """
    from modpass.exporters.decoder_manifest import TOKENIZER, DecoderManifest
    from modpass.exporters.session import DecoderSession

    # a folder of another kind is refused for that, not for its lack of a tokenizer
    DecoderManifest.load(folder).check(folder, f"{TOKENIZER}/")
    tokenizer = _tokenizer(folder)
    session = DecoderSession(folder, backend)
    ids = _encode(tokenizer, prompt, chat)
    stream = TextStream(tokenizer, sys.stdout)
    stop = [i for i in [tokenizer.eos_token_id] if i is not None]
    found = session.generate(
        [ids], max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop,
        stream=lambda row, token: stream.push(token),
    )  # fmt: skip
    stream.end()
    s = found.statistics
    text = f"{s.tokens} tokens, {s.tokens_per_second:.1f} tokens/s after a prefill of {s.prefill_seconds:.2f} s"
    if s.decisions:
        text += f"; {s.skipped_share:.0%} of routed blocks skipped"
    text += f"; caches {mebibytes(s.cache_bytes)}"
    if (reason := getattr(session.backend, "uncaptured", None)) is not None:
        text += f"; no CUDA graph of a step: {reason}"
    print(text, file=sys.stderr)


def _tokenizer(folder: Path) -> Any:
    if not (folder / "tokenizer").is_dir():
        raise InputError(
            f"'{folder}' holds no tokenizer; export it with one (export_decoder(..., tokenizer=)), or use "
            "DecoderSession with token ids"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError as e:
        raise MissingExtraError("generating text needs transformers; pip install 'modpass[hf]'") from e
    return AutoTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True)


def _encode(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    if not chat:
        return list(tokenizer(prompt).input_ids)
    message = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


class TextStream:
    """Writes text as its tokens come; a token that ends within a character waits for the next.

    >>> class Letters:
    ...     def decode(self, ids, **_): return "".join("ab"[i] for i in ids)
    >>> stream = TextStream(Letters(), sys.stdout); stream.push(0); stream.push(1); stream.end()
    ab
    """

    def __init__(self, tokenizer: Any, out: Any) -> None:
        self.tokenizer, self.out = tokenizer, out
        self.ids: list[int] = []
        self.written = 0

    def push(self, token: int) -> None:
        """Take one more token."""
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if not text.endswith("\ufffd"):
            self.out.write(text[self.written :])
            self.out.flush()
            self.written = len(text)

    def end(self) -> None:
        """Write what still waits, and end the line."""
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        self.out.write(text[self.written :] + "\n")
        self.out.flush()
