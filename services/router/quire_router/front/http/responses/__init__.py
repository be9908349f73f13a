"""OpenAI's Responses API: bodies to jobs, answers as response objects and typed events, and where these are kept."""
