"""Request bodies: fields, their bounds, and the jobs that are made of them."""
