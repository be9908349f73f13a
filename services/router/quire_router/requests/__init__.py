"""The life of a request: admission, prompts as tokens, its sequences' start, and its answer."""
