"""Several HTTP processes in front of one that decides.

    client -> edge process (HTTP, templates, tokens, text) -> hub, in the process of `RequestFlow` -> workers

Text is most of a router's work and needs nothing shared; deciding needs everything shared and is little. So text is
spread over processes, and there is one registry, one index, one queue and one set of bookings: decisions are the same
as with one process.
"""
