import threading

queue_lock = threading.Lock()


def wrap_queued_call(function):
    def queued(*args, **kwargs):
        with queue_lock:
            return function(*args, **kwargs)

    return queued
