"""The worker process of one device: a host, channels to engines, orders of the supervisor."""
