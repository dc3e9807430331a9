"""The same work for many records, on one machine or on a cluster of Ray: each record once, however runs end."""
