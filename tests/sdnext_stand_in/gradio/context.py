import threading

thread_data = threading.local()
