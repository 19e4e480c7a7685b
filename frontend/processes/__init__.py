"""Several router processes on one port: edge processes answer HTTP, and one process, the hub, decides for all of them.

    client -> edge process -> hub        tandem serve: text and tokens at the edge; admission and workers in the hub
    client -> edge process -> engine     tandem route: bytes are relayed at the edge; the hub says where each goes
                     \\-> hub

Text and bytes are most of a router's work and need nothing shared; deciding needs everything shared and is little. So
there is one registry, one index, one queue and one set of bookings: decisions are the same as with one process.
"""
