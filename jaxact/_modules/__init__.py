"""One module library a file, and how a target finds its library."""
