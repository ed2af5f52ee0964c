"""One operation of a job in a process of its own: staging, persistent buffers, programs of a site."""
