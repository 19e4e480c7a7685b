"""Which requests wait, go, or are refused: forecasts in seconds, fair order between tenants, deadlines."""
