"""What every other package may use: errors, threads, files, plugins, names of modules."""
