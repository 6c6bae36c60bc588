"""The programs that Transplant runs in. The core imports none of them."""
