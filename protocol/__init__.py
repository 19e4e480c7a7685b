"""What crosses a process: messages, sampling parameters, block digests, configuration, errors. No torch."""
