"""OpenAI's batch files: requests in, answers out, by custom_id."""
