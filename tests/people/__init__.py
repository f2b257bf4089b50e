"""The stumbling blocks that people met: output of commands, signatures, texts of errors."""
