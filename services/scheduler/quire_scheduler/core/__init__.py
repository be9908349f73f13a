"""What a replica decides, pure and synchronous: requests in, Grants out; Reports in, outputs out."""
