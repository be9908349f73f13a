"""The matcher: processes beside the engine that compile grammars and compute masks of the tokens that they allow."""
