"""The HTTP layer that every route shares: server, limits, authentication, errors, response writing."""
