"""The metrics that come with ikkuna: plugins like any other, one metric a file."""
