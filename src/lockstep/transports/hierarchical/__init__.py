"""Groups that span hosts: shared memory inside each host, Gloo between them."""
