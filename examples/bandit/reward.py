"""The bandit's reward: what the table says of the action that the model names, -1 if it names none."""


def reward_fn(messages, answer):
    action = messages[-1]["content"].strip()
    return answer.get(action, -1.0)
