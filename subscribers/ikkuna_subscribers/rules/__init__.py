"""The rules that come with ikkuna: plugins like any other, one rule a file."""
