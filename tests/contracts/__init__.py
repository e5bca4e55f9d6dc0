"""One suite for each protocol that has several implementations. `test_stores.py` and `test_disks.py` bind them.

To test a new store engine, subclass `StoreContract` and implement `open_store`; for a place that holds large blobs,
subclass `BlobStoreContract`; for a disk, `DiskContract`.
"""
