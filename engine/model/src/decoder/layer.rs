//! A decoder's weights: what they are together is the same on every device, how a device holds each is its own.

/// How a device holds weights.
pub trait Layout {
    /// A matrix, `[outputs, inputs]`.
    type Matrix;
    /// Some f32, such as a norm's weights.
    type Vector;
    /// The projections of queries, keys and values.
    type Qkv: Matrices<Self::Matrix>;
    /// A gated feed-forward block: gate, up and down.
    type Gated: Matrices<Self::Matrix>;
    /// A mixture of experts, with its router.
    type Experts: Matrices<Self::Matrix>;
}

/// What is made of several matrices.
pub trait Matrices<M> {
    /// All of them.
    fn matrices(&self) -> Vec<&M>;
}

/// The weights of a decoder, or of a stage of one.
pub struct DecoderWeights<L: Layout> {
    /// Absent in a stage that neither embeds tokens nor has a head that is tied to the embedding.
    pub embedding: Option<L::Matrix>,
    /// In their order.
    pub layers: Vec<Layer<L>>,
    /// Absent where a stage comes behind.
    pub head: Option<Head<L>>,
    /// Whether tokens are embedded here: no stage comes before.
    pub embeds: bool,
}

/// What makes logits of the residual stream.
pub struct Head<L: Layout> {
    /// Of the residual stream, before the product.
    pub norm: L::Vector,
    /// Absent where the head is tied to the embedding.
    pub untied: Option<L::Matrix>,
}

/// One layer: a mixer, which lets a token see others, and a feed-forward block, which does not.
pub struct Layer<L: Layout> {
    /// Before the mixer.
    pub mixer_norm: L::Vector,
    /// The mixer.
    pub mixer: Mixer<L>,
    /// Of what the mixer gives, in families that norm it.
    pub post_mixer_norm: Option<L::Vector>,
    /// Before the feed-forward block.
    pub feed_forward_norm: L::Vector,
    /// The feed-forward block.
    pub feed_forward: FeedForward<L>,
    /// Of what the feed-forward block gives, in families that norm it.
    pub post_feed_forward_norm: Option<L::Vector>,
}

/// What lets a token see others.
pub enum Mixer<L: Layout> {
    /// Softmax attention over cached keys and values.
    Attention(Attention<L>),
}

/// The weights of softmax attention.
pub struct Attention<L: Layout> {
    /// Projections of queries, keys and values.
    pub qkv: L::Qkv,
    /// Their biases, one after the other.
    pub bias: Option<L::Vector>,
    /// Norms of each head of queries, and of keys.
    pub head_norms: Option<[L::Vector; 2]>,
    /// Whether heads get rotary positions.
    pub is_rotary: bool,
    /// The output projection.
    pub out: L::Matrix,
}

/// What a token goes through by itself.
pub enum FeedForward<L: Layout> {
    /// One block for all tokens.
    Dense(L::Gated),
    /// A few of many for each token.
    Experts(L::Experts),
}

impl<L: Layout> DecoderWeights<L> {
    /// The matrix whose rows the residual stream begins with; absent where the stage before gives it.
    pub fn input_embedding(&self) -> Option<&L::Matrix> {
        self.embedding.as_ref().filter(|_| self.embeds)
    }

    /// The head's norm and matrix.
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
