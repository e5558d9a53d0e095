//! The weights of a decoder. Their structure is the same on every device; a [`Layout`] says how a device stores each.

/// The types in which a device stores weights.
pub trait Layout {
    /// A matrix, `[outputs, inputs]`.
    type Matrix;
    /// A vector of f32, such as the weights of a norm.
    type Vector;
    /// The projections of queries, keys and values.
    type Qkv: Matrices<Self::Matrix>;
    /// A gated feed-forward block: gate, up and down.
    type Gated: Matrices<Self::Matrix>;
    /// A mixture of experts, with its router.
    type Experts: Matrices<Self::Matrix>;
}

/// Weights that consist of several matrices.
pub trait Matrices<M> {
    /// All the matrices.
    fn matrices(&self) -> Vec<&M>;
}

/// The weights of a decoder, or of one pipeline stage.
pub struct DecoderWeights<L: Layout> {
    /// `None` in a stage that neither embeds tokens nor has a head that is tied to the embedding.
    pub embedding: Option<L::Matrix>,
    /// In order of computation.
    pub layers: Vec<Layer<L>>,
    /// `None` unless this is the last stage.
    pub head: Option<Head<L>>,
    /// Whether tokens are embedded here: this is the first stage.
    pub embeds: bool,
}

/// The weights that turn the residual stream into logits.
pub struct Head<L: Layout> {
    /// Norm of the residual stream, before the product.
    pub norm: L::Vector,
    /// `None` if the head is tied to the embedding.
    pub untied: Option<L::Matrix>,
}

/// One layer: a mixer, in which tokens see each other, and a feed-forward block, which treats each token alone.
pub struct Layer<L: Layout> {
    /// Norm before the mixer.
    pub mixer_norm: L::Vector,
    /// The mixer.
    pub mixer: Mixer<L>,
    /// Norm of the mixer's output, in families that have one (Gemma).
    pub post_mixer_norm: Option<L::Vector>,
    /// Norm before the feed-forward block.
    pub feed_forward_norm: L::Vector,
    /// The feed-forward block.
    pub feed_forward: FeedForward<L>,
    /// Norm of the feed-forward block's output, in families that have one (Gemma).
    pub post_feed_forward_norm: Option<L::Vector>,
}

/// The part of a layer in which tokens see each other.
pub enum Mixer<L: Layout> {
    /// Softmax attention over cached keys and values.
    Attention(Attention<L>),
}

/// The weights of softmax attention.
pub struct Attention<L: Layout> {
    /// Projections of queries, keys and values.
    pub qkv: L::Qkv,
    /// Biases of queries, keys and values, concatenated.
    pub bias: Option<L::Vector>,
    /// Norms of each query head and of each key head.
    pub head_norms: Option<[L::Vector; 2]>,
    /// Whether rotary positions are applied to the heads.
    pub is_rotary: bool,
    /// The output projection.
    pub out: L::Matrix,
}

/// The part of a layer that treats each token alone.
pub enum FeedForward<L: Layout> {
    /// One block for all tokens.
    Dense(L::Gated),
    /// A mixture of experts: some blocks for each token.
    Experts(L::Experts),
}

impl<L: Layout> DecoderWeights<L> {
    /// The embedding, from which the residual stream starts; `None` if the previous stage supplies the residual stream.
    pub fn input_embedding(&self) -> Option<&L::Matrix> {
        self.embedding.as_ref().filter(|_| self.embeds)
    }

    /// The norm and the matrix of the head.
    pub fn output(&self) -> Option<(&L::Vector, &L::Matrix)> {
        let head = self.head.as_ref()?;
        Some((&head.norm, head.untied.as_ref().or(self.embedding.as_ref())?))
    }

    /// The matrices that every token is multiplied with.
    pub fn layer_matrices(&self) -> impl Iterator<Item = &L::Matrix> {
        self.layers.iter().flat_map(Layer::matrices)
    }

    /// The matrices that a token with logits is multiplied with: all but an embedding that is not the head too.
    pub fn products(&self) -> impl Iterator<Item = &L::Matrix> {
        self.layer_matrices().chain(self.output().map(|(_, matrix)| matrix))
    }

    /// Every matrix, each once.
    pub fn matrices(&self) -> impl Iterator<Item = &L::Matrix> {
        let untied = self.head.iter().flat_map(|head| &head.untied);
        self.layer_matrices().chain(&self.embedding).chain(untied)
    }

    /// Norms and biases.
    pub fn vectors(&self) -> impl Iterator<Item = &L::Vector> {
        self.layers.iter().flat_map(Layer::vectors).chain(self.head.iter().map(|head| &head.norm))
    }

    /// The layers' mixtures of experts.
    pub fn experts(&self) -> impl Iterator<Item = &L::Experts> {
        self.layers.iter().filter_map(|layer| match &layer.feed_forward {
            FeedForward::Experts(experts) => Some(experts),
            FeedForward::Dense(_) => None,
        })
    }
}

impl<L: Layout> Layer<L> {
    fn matrices(&self) -> impl Iterator<Item = &L::Matrix> {
        let Mixer::Attention(Attention { qkv, out, .. }) = &self.mixer;
        let feed_forward = match &self.feed_forward {
            FeedForward::Dense(gated) => gated.matrices(),
            FeedForward::Experts(experts) => experts.matrices(),
        };
        qkv.matrices().into_iter().chain([out]).chain(feed_forward)
    }

    fn vectors(&self) -> impl Iterator<Item = &L::Vector> {
        let Mixer::Attention(Attention { bias, head_norms, .. }) = &self.mixer;
        let norms = [&self.mixer_norm, &self.feed_forward_norm];
        let post_norms = self.post_mixer_norm.iter().chain(&self.post_feed_forward_norm);
        norms.into_iter().chain(post_norms).chain(bias).chain(head_norms.iter().flatten())
    }
}
