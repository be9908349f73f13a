"""Container images: their content, their builds, and a test that they run (`make images`)."""
