"""`python -m quire_tokenizer --model FOLDER`: flags to config, then the service's whole life."""

from __future__ import annotations

import sys

from quire_common.server import run_aio, service_main
from quire_tokenizer.config import TokenizerConfig
from quire_tokenizer.server import TokenizerService


def main() -> int:
    """The process's exit code."""
    return service_main(
        "tokenizer", TokenizerConfig, lambda config: run_aio(config, lambda _: TokenizerService(config))
    )


if __name__ == "__main__":
    sys.exit(main())
