class ModelData:
    sd_model = None


model_data = ModelData()
