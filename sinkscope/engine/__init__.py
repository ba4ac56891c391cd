"""One scan: a request is read, batches pass through the watched model, and a run comes out."""
