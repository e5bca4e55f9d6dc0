"""Where everything durable lives: tables, journals and blobs behind one small protocol, and its engines."""
