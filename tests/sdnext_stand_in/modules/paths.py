import os

data_path = os.getcwd()
