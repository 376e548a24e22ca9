"""Groups that span machines: shared memory inside each, Gloo between them."""
