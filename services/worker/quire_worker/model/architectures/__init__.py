"""The registry of model families."""

from __future__ import annotations

from typing import Final

from quire_common.errors import Unsupported
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.layer_norm.bloom import BLOOM
from quire_worker.model.architectures.layer_norm.cohere import COHERE, COHERE2
from quire_worker.model.architectures.layer_norm.falcon import FALCON
from quire_worker.model.architectures.layer_norm.gpt2 import GPT2
from quire_worker.model.architectures.layer_norm.gpt_neox import GPT_NEOX
from quire_worker.model.architectures.layer_norm.gptj import GPTJ
from quire_worker.model.architectures.layer_norm.mpt import MPT
from quire_worker.model.architectures.layer_norm.nemotron import NEMOTRON
from quire_worker.model.architectures.layer_norm.olmo import OLMO
from quire_worker.model.architectures.layer_norm.opt import OPT
from quire_worker.model.architectures.layer_norm.persimmon import PERSIMMON
from quire_worker.model.architectures.layer_norm.phi import PHI
from quire_worker.model.architectures.layer_norm.stablelm import STABLELM
from quire_worker.model.architectures.layer_norm.starcoder2 import STARCODER2
from quire_worker.model.architectures.rms_norm.afmoe import AFMOE
from quire_worker.model.architectures.rms_norm.arcee import ARCEE
from quire_worker.model.architectures.rms_norm.exaone4 import EXAONE4
from quire_worker.model.architectures.rms_norm.gemma import GEMMA, GEMMA2, GEMMA3
from quire_worker.model.architectures.rms_norm.glm import GLM, GLM4
from quire_worker.model.architectures.rms_norm.granite import GRANITE
from quire_worker.model.architectures.rms_norm.hunyuan import HUNYUAN
from quire_worker.model.architectures.rms_norm.llama import LLAMA
from quire_worker.model.architectures.rms_norm.mistral import MINISTRAL, MISTRAL
from quire_worker.model.architectures.rms_norm.olmo2 import OLMO2, OLMO3
from quire_worker.model.architectures.rms_norm.phi3 import PHI3
from quire_worker.model.architectures.rms_norm.qwen2 import QWEN2
from quire_worker.model.architectures.rms_norm.qwen3 import QWEN3
from quire_worker.model.architectures.rms_norm.qwen3_next import QWEN3_NEXT
from quire_worker.model.architectures.rms_norm.seed_oss import SEED_OSS
from quire_worker.model.architectures.rms_norm.smollm3 import SMOLLM3
from quire_worker.model.config_file import ConfigFile

ALL_FAMILIES: Final = (
    LLAMA, QWEN2, QWEN3, MISTRAL, MINISTRAL, GRANITE, SEED_OSS, SMOLLM3, HUNYUAN, GEMMA, GEMMA2, GEMMA3, PHI, PHI3, GLM,
    GLM4, OLMO, OLMO2, OLMO3, COHERE, COHERE2, STARCODER2, GPT2, GPT_NEOX, GPTJ, OPT, BLOOM, FALCON, MPT, STABLELM,
    EXAONE4, NEMOTRON, PERSIMMON, ARCEE, AFMOE, QWEN3_NEXT,
)  # fmt: skip  # a list of names
FAMILIES: dict[str, Family] = {name: family for family in ALL_FAMILIES for name in family.architectures}


def has_family(config: ConfigFile) -> bool:
    """Whether Quire computes this model: the first of the config's architectures that has a family decides, and the
    family must cover the model. False if no architecture has a family."""
    return next((FAMILIES[name].has_model(config) for name in config.texts("architectures") if name in FAMILIES), False)


def find_family(config: ConfigFile) -> tuple[str, Family]:
    """Return the first of the config's architectures that is supported, with its family. Raises Unsupported if none
    is."""
    wanted = config.texts("architectures")
    for name in wanted:
        if name in FAMILIES:
            return name, FAMILIES[name]
    asked = ", ".join(wanted) if wanted else f"none (model_type {config.text('model_type', 'absent')})"
    raise Unsupported(
        "UNSUPPORTED_ARCHITECTURE",
        f"{config.source} names the architecture {asked}, which is not supported. Supported: {', '.join(FAMILIES)}.",
        "Serve a model of a supported architecture.",
    )
