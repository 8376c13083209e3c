"""Which models are measured: every architecture that ``transformers`` registers, and a few others."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from modpass.bench.coverage_configs import enliven, shrink
from modpass.bench.coverage_inputs import inputs_for
from modpass.bench.coverage_others import OTHERS
from modpass.bench.coverage_overrides import overrides_for
from modpass.bench.offline import transformers_offline
from modpass.errors import InputError

__all__ = ["FAMILIES", "Made", "make_model", "model_names", "with_inputs"]

# The registries of transformers, most telling class first: an architecture in several counts once.
_REGISTRIES = {
    "causal-lm": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
    "encoder": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES"),
    "image": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "MODEL_FOR_IMAGE_MAPPING_NAMES"),
    "encoder-decoder": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
}
FAMILIES = (*_REGISTRIES, "other")


@dataclass(frozen=True)
class Made:
    """A model in eval mode, and its example inputs (None: the model says itself what it takes).

    plain: the module whose blocks the slow reference replaces; another one where the model is itself a graph.
    """

    model: nn.Module
    example_inputs: dict[str, Any] | None
    plain: nn.Module


def model_names(family: str) -> dict[str, str]:
    """The architectures of a family, and the class that stands for each.

    Raises:
        InputError: there is no such family.

    >>> model_names("causal-lm")["llama"]
    'LlamaForCausalLM'
    """
    if family not in FAMILIES:
        raise InputError(f"there is no family '{family}'; there are: {', '.join(FAMILIES)}")
    if family == "other":
        return {name: other.kind for name, other in OTHERS.items()}
    transformers_offline("hf")
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for registry in _REGISTRIES[family]:
        for name, classes in getattr(modeling_auto, registry).items():
            found.setdefault(name, classes if isinstance(classes, str) else classes[0])
    return found


def make_model(family: str, name: str) -> Made:
    """A tiny random model of one architecture, the same one each time.

    Raises:
        Exception: whatever the architecture's own code raises.
    """
    torch.manual_seed(0)
    if family == "other":
        model, inputs, plain = OTHERS[name].make()
        return Made(enliven(model).eval(), inputs, (plain or model).eval())
    transformers = transformers_offline("hf")
    cls = getattr(transformers, model_names(family)[name])
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config: Any = getattr(cls, "config_class", None) or CONFIG_MAPPING[name]
    # an encoder's language model is causal only by this flag
    causal = family == "causal-lm" and any(f.name == "is_decoder" for f in fields(config))
    given = {"is_decoder": True} if causal else {}
    model = enliven(cls(shrink(config, **(given | overrides_for(cls.__name__))))).eval()
    return Made(model, None, model)


def with_inputs(made: Made) -> Made:
    """The model with inputs on which it runs."""
    return made if made.example_inputs is not None else Made(made.model, inputs_for(made.model), made.plain)
