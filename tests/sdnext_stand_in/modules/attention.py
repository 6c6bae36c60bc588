dispatched = []


def set_attention_dispatcher(pipeline):
    dispatched.append(pipeline)
