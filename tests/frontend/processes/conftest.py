from tests.router.engines.conftest import fake_a, fake_b

__all__ = ["fake_a", "fake_b"]
