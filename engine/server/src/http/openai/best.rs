//! The most likely of several answers to one prompt.

use crate::answer::Whole;
use crate::generation::Choices;

/// Of the answers to each prompt, prompt after prompt, those to give, the most likely first.
pub fn of_each_prompt(answers: Vec<Whole>, choices: Choices) -> Vec<Whole> {
    if choices.given == choices.generated {
        return answers;
    }
    let (mut given, mut answers) = (Vec::new(), answers.into_iter().peekable());
    while answers.peek().is_some() {
        let mut own: Vec<Whole> = answers.by_ref().take(choices.generated as usize).collect();
        own.sort_by(|a, b| likelihood(b).total_cmp(&likelihood(a)));
        given.extend(own.into_iter().take(choices.given as usize));
    }
    given
}

/// The mean log probability of an answer's tokens, so that a long answer is not worse for its length.
fn likelihood(answer: &Whole) -> f32 {
    let tokens = &answer.thoughts.tokens;
    tokens.iter().map(|scores| scores.chosen.logprob).sum::<f32>() / tokens.len().max(1) as f32
}
