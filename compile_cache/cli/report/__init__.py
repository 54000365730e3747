"""`compile-cache report`: one page of HTML from boot reports and a store, and the picture of a boot."""
