"""The wire contract of inferq, and the broker topology as data. No I/O, no sockets."""
