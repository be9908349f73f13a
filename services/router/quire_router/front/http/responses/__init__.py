"""OpenAI's Responses API: converts bodies to jobs, writes answers as response objects and typed events, and stores
them."""
