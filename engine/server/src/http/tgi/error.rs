//! Refusals and failures in this dialect's envelope.

use crate::http::error::ApiError;
use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use windlass_engine_api::tgi::ErrorResponse;

/// A response that is not a success.
pub struct TgiError(ApiError);

impl<T: Into<ApiError>> From<T> for TgiError {
    fn from(error: T) -> TgiError {
        TgiError(error.into())
    }
}

impl IntoResponse for TgiError {
    fn into_response(self) -> Response {
        // Headers say when to come back in every dialect.
        let mut response = self.0.clone().into_response();
        let status = match response.status() {
            // What the request asks for is wrong; how it is written has other statuses.
            StatusCode::BAD_REQUEST => StatusCode::UNPROCESSABLE_ENTITY,
            StatusCode::INTERNAL_SERVER_ERROR => StatusCode::FAILED_DEPENDENCY,
            status => status,
        };
        let own = (status, Json(body(self.0))).into_response();
        response.headers_mut().remove(axum::http::header::CONTENT_LENGTH);
        let (mut head, _) = response.into_parts();
        head.status = status;
        Response::from_parts(head, own.into_body())
    }
}

/// The envelope.
pub fn body(error: ApiError) -> ErrorResponse {
    let kind = match error.status() {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => "overloaded",
        status if status.is_server_error() => "generation",
        _ => "validation",
    };
    ErrorResponse { error: error.envelope().error.message, error_type: kind.to_owned() }
}
