"""Tests for parts that other packages add: a package imports a suite, and pytest runs it against the package's part."""

if __name__ != "tandem.testing":
    raise ImportError("import tandem.testing: tandem is the one import root")
