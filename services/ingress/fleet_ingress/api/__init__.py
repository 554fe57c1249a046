"""What clients send and get: typed structs, one module per concern; the OpenAPI document is made from them."""
