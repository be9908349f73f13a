"""`python -m quire_tokenizer --model FOLDER`: flags to config, then the service's whole life."""

from __future__ import annotations

import os
import sys

from quire_common.serving.server import run_aio, service_main
from quire_tokenizer.config import TokenizerConfig
from quire_tokenizer.server import TokenizerService


def main() -> int:
    """Run the service until it ends. Returns the process's exit code."""
    return service_main("tokenizer", TokenizerConfig, _run)


def _run(config: TokenizerConfig) -> int:
    # The tokenizers library would take a thread for each core of the host, for batches of texts.
    os.environ.setdefault("RAYON_NUM_THREADS", str(config.encode_threads))
    return run_aio(config, lambda _: TokenizerService(config))


if __name__ == "__main__":
    sys.exit(main())
