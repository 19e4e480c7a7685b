"""Carries out decisions: admission queue, our workers, other engines. They are made in `scheduling/`, without I/O."""

if __name__ != "tandem.router":
    raise ImportError("import tandem.router: tandem is the one import root")
