"""OpenAI's batch files: a file of requests, and a file of answers with the same custom_ids."""
