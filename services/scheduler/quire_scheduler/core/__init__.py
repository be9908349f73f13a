"""The decisions of a replica, pure and synchronous: requests in, Grants out; Reports in, outputs out."""
