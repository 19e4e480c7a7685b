"""Virtual-time replay of traces through the product's own placement: what a policy would do on a cluster one lacks."""
