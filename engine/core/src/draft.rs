//! Draft tokens: a tree of them, its verification, and the proposers that make it.
//!
//! Speculative decoding (Leviathan et al., "Fast inference from transformers via speculative decoding", 2023): a step
//! computes the draft tokens beside the token that is due, and samples a token after each of them. A node of the tree
//! proposes one token with probability 1, so rejection sampling reduces to this: sample from the model's
//! distribution; if the sample is the node's token, accept it and go on after it; otherwise keep the sample, which
//! then has the distribution without that token. Each position samples with its own seed, so draft tokens change the
//! number of steps and no token.

mod lookup;
mod suffix;

use std::fmt;

use crate::request::{RequestId, TokenId};
pub use lookup::PromptLookup;
pub use suffix::SuffixAutomaton;

/// Most draft tokens of a sequence in one step.
pub const MAX_DRAFT_TOKENS: usize = 32;

/// Draft tokens after the last known token: each node follows its parent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DraftTree {
    nodes: Vec<DraftNode>,
}

/// One draft token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftNode {
    /// The token.
    pub token: TokenId,
    /// Index of the parent, which is lower than its own; `None` for a child of the last known token.
    pub parent: Option<u32>,
}

/// Result of verifying a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verification {
    /// The sampled tokens: those of the accepted nodes, then one more.
    pub tokens: Vec<TokenId>,
    /// Indices of the accepted nodes, each a child of the one before.
    pub accepted: Vec<u32>,
}

impl DraftTree {
    /// A tree without branches.
    pub fn chain(tokens: impl IntoIterator<Item = TokenId>) -> DraftTree {
        let node = |(index, token): (u32, TokenId)| DraftNode { token, parent: index.checked_sub(1) };
        DraftTree { nodes: (0..).zip(tokens).map(node).collect() }
    }

    /// Adds a node and returns its index.
    ///
    /// # Panics
    /// If there is no such parent.
    pub fn push(&mut self, token: TokenId, parent: Option<u32>) -> u32 {
        assert!(parent.is_none_or(|parent| (parent as usize) < self.nodes.len()), "no node {parent:?}");
        self.nodes.push(DraftNode { token, parent });
        self.nodes.len() as u32 - 1
    }

    /// Number of draft tokens.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether there are no draft tokens.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// All nodes, parents before their children.
    pub fn nodes(&self) -> &[DraftNode] {
        &self.nodes
    }

    /// Whether the tree has no branches.
    pub fn is_chain(&self) -> bool {
        (0..).zip(&self.nodes).all(|(index, node)| node.parent == u32::checked_sub(index, 1))
    }

    /// The first `count` nodes.
    pub fn first(&self, count: usize) -> DraftTree {
        DraftTree { nodes: self.nodes[..count.min(self.len())].to_vec() }
    }

    /// The subtree after `token`, if `token` is a child of the last known token.
    pub fn subtree_after(&self, token: TokenId) -> Option<DraftTree> {
        let root = self.nodes.iter().position(|node| node.parent.is_none() && node.token == token)?;
        let (mut rest, mut moved) = (DraftTree::default(), vec![None; self.len()]);
        for (index, node) in self.nodes.iter().enumerate().skip(root + 1) {
            let Some(parent) = node.parent.map(|parent| parent as usize) else { continue };
            if parent == root || moved[parent].is_some() {
                moved[index] = Some(rest.push(node.token, moved[parent]));
            }
        }
        Some(rest)
    }

    /// The path from the root to `node`, which is its last element.
    pub fn path(&self, node: u32) -> Vec<u32> {
        let mut path = Vec::new();
        let mut next = Some(node);
        while let Some(node) = next {
            path.push(node);
            next = self.nodes[node as usize].parent;
        }
        path.reverse();
        path
    }

    /// Verifies the tree. `drawn` samples the token after the last known one (`None`) or after a node; it is called
    /// along one path only.
    pub fn verify<E>(&self, mut drawn: impl FnMut(Option<u32>) -> Result<TokenId, E>) -> Result<Verification, E> {
        let mut verification = Verification { tokens: Vec::new(), accepted: Vec::new() };
        loop {
            let last = verification.accepted.last().copied();
            let token = drawn(last)?;
            verification.tokens.push(token);
            let next = self.nodes.iter().position(|node| node.parent == last && node.token == token);
            match next {
                Some(node) => verification.accepted.push(node as u32),
                None => return Ok(verification),
            }
        }
    }
}

/// Proposes draft tokens.
pub trait Proposer: fmt::Debug + Send {
    /// A tree for each request, in order; empty if there is nothing to propose.
    fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Vec<DraftTree>;

    /// Whether proposing costs almost nothing, so that it is done in every step to measure the acceptance rate.
    fn is_free(&self) -> bool;

    /// The request has finished.
    fn forget(&mut self, request: RequestId);
}

/// A sequence to propose draft tokens for.
#[derive(Clone, Copy, Debug)]
pub struct DraftRequest<'a> {
    /// The request.
    pub request: RequestId,
    /// All tokens, prompt and answer: mostly those of the previous call and a few more.
    pub tokens: &'a [TokenId],
    /// Most draft tokens that are useful.
    pub max_tokens: usize,
}

/// A chain that repeats `tokens[from..]`, again and again up to `max_tokens`.
fn continuation(tokens: &[TokenId], from: usize, max_tokens: usize) -> DraftTree {
    let period = tokens.len() - from;
    DraftTree::chain((0..max_tokens).map(|index| tokens[from + index % period]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_followed_by_what_is_drawn() {
        let mut tree = DraftTree::default();
        let [one, two] = [tree.push(1, None), tree.push(2, None)];
        let [three, four] = [tree.push(3, Some(two)), tree.push(4, Some(two))];
        let verify = |draws: &[(Option<u32>, TokenId)]| {
            let drawn = |after| draws.iter().find(|(place, _)| *place == after).map(|(_, token)| *token).ok_or(());
            tree.verify(drawn).map(|verification| (verification.tokens, verification.accepted))
        };
        assert_eq!(verify(&[(None, 9)]), Ok((vec![9], vec![])));
        assert_eq!(verify(&[(None, 2), (Some(two), 4), (Some(four), 3)]), Ok((vec![2, 4, 3], vec![two, four])));
        assert_eq!(verify(&[(None, 1), (Some(one), 3)]), Ok((vec![1, 3], vec![one])));
        assert_eq!(verify(&[(None, 2)]), Err(()), "what follows a draft that accepted is asked for");
        assert_eq!((tree.path(three), tree.is_chain()), (vec![two, three], false));
        let mut subtree = DraftTree::default();
        [3, 4].iter().for_each(|token| _ = subtree.push(*token, None));
        assert_eq!(
            [tree.subtree_after(1), tree.subtree_after(2), tree.subtree_after(3)],
            [Some(DraftTree::default()), Some(subtree), None]
        );
    }

    #[test]
    fn a_chain_is_accepted_up_to_the_first_wrong_token() {
        let chain = DraftTree::chain([5, 6, 7]);
        let text = [5, 6, 8, 9];
        let drawn = |after: Option<u32>| Ok::<_, ()>(text[after.map_or(0, |node| node as usize + 1)]);
        assert_eq!(chain.verify(drawn), Ok(Verification { tokens: vec![5, 6, 8], accepted: vec![0, 1] }));
        assert!(chain.is_chain() && chain.path(2) == [0, 1, 2]);
        assert_eq!(chain.subtree_after(5), Some(DraftTree::chain([6, 7])));
    }

    #[test]
    fn a_continuation_repeats_what_repeats() {
        assert_eq!(continuation(&[9, 1, 2], 1, 5), DraftTree::chain([1, 2, 1, 2, 1]));
    }
}
