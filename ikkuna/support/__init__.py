"""Tools of all other packages: threads, files, plugins, names of modules."""
