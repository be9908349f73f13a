"""Makes a paced ServedModel from the configuration. It replaces `model_source`, and loads no weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire_common.credit import KvGroup, ModelInfo, PageGeometry
from quire_common.logits_processors import capabilities_of
from quire_common.pages import namespace_digest
from quire_worker.matcher.matcher_factory import grammar_capabilities
from quire_worker.matcher.step_masks import MAX_CONSTRAINED_ROW_TOKENS, ForcedTokens
from quire_worker.paced.facts import ARCHITECTURE, read_facts
from quire_worker.paced.faults import StepFaults, parse_faults
from quire_worker.paced.page_array import BYTES_PER_TOKEN, PageArray
from quire_worker.paced.random_yields import RandomYields
from quire_worker.paced.runner import PacedRunner
from quire_worker.replica import ServedModel, from_host, on_host
from quire_worker.sampling.logits_processor import load_processors

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_worker.config import WorkerConfig

# The default pool: half a million tokens of KV.
DEFAULT_PAGES = 32_768
# The odds of `--paced-yields`.
YIELDS_ROW_TOKENS = 4
_DTYPE, _LAYOUT = "uint64", "token"
_CAPABILITIES = ("greedy", "temperature", "seed", "logprobs", "min_tokens", "thinking_token_budget", "batch_invariant")


def load_paced(config: WorkerConfig, progress: Callable[[str, int, int], None]) -> ServedModel:
    """Make a ServedModel of the made-up model, with its pages, faults, logits processors and, if --paced-yields is
    given, random drafts and holds. Loads no weights, and calls `progress` once, with the phase `config`; at the end,
    another process may test whether grammars can be applied. Raises ConfigError for a model folder without facts, sizes
    that make no sense, a wrong fault, or a logits processor that is missing or broken, and Unsupported as `read_facts`
    does."""
    progress("config", 0, 0)
    facts, size = read_facts(config.model, config.max_model_len), config.page_size
    pages = PageArray(_num_pages(config), size)
    processors = load_processors(config.logits_processors, Path(config.model))
    faults = StepFaults(parse_faults(config.paced_fault))
    runner = PacedRunner(pages, facts.vocab_size, config.paced or 0.0, config.paced_prefill_us_per_token, faults=faults)
    yields: RandomYields | None = None
    if config.paced_yields:
        yields = RandomYields(PacedRunner(pages, facts.vocab_size), facts.vocab_size, config.paced_yields)
    group = KvGroup("full", pages.page_bytes, _LAYOUT, _DTYPE, 1, 1, 1)
    namespace = namespace_digest(ARCHITECTURE, facts.digest, _DTYPE, f"full:{_LAYOUT}", size)
    info = ModelInfo(
        name=config.name,
        architecture=ARCHITECTURE,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        digest=facts.digest,
        pages=PageGeometry(size, (group,), namespace),
        weights_version=facts.digest.hex()[:16],
        capabilities=_CAPABILITIES
        + capabilities_of(processors)
        + grammar_capabilities(config, facts.vocab_size, facts.eos_token_ids),
    )
    return ServedModel(
        on_host(runner, ForcedTokens(yields), yields),
        from_host(pages),
        info,
        pages.num_pages,
        logits_processors=processors,
        max_row_tokens=1 if yields is None else YIELDS_ROW_TOKENS,
        max_constrained_row_tokens=MAX_CONSTRAINED_ROW_TOKENS,
        model_path=config.model,
    )


def _num_pages(config: WorkerConfig) -> int:
    """Return the number of KV pages, page 0 included: one more than --paced-pages, else as many as fill
    --kv-cache-memory-bytes, else the default."""
    if config.paced_pages:
        return config.paced_pages + 1
    if config.kv_cache_memory_bytes:
        return config.kv_cache_memory_bytes // (BYTES_PER_TOKEN * config.page_size)
    return DEFAULT_PAGES + 1
