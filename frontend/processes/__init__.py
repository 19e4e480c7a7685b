"""Several router processes on one port: frontend processes answer HTTP, and one process decides for all of them.

    client -> frontend process -> deciding process  tandem serve: text and tokens here; admission and workers there
    client -> frontend process -> engine            tandem route: bytes are relayed here; there is decided where to
                     \\-> deciding process

Text and bytes are most of a router's work and need nothing shared; deciding needs everything shared and is little. So
there is one registry, one index, one queue and one set of bookings: decisions are the same as with one process.

A frontend process calls methods of the Protocols that its own objects would have too (`methods.py`). Which ones it may
call is listed in `backend_service.py` and `dispatch_service.py`; `KeyUses` are those for limits of API keys.
"""
